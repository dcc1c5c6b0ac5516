"""From documents on disk to sharded batches on devices."""
