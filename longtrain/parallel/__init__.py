"""Where the devices are: the mesh, the sharding table, process start-up, collective backends."""
