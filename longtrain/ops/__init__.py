"""The operations that sharding over the sequence makes special: attention, rotary phases, loss, chunked MLP."""
