"""Time, memory and throughput of methods and of other systems, measured in turns."""
