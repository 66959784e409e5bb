"""Time, memory and throughput of methods and peers, measured in turns."""
