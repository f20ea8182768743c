"""What a call costs before it runs: bytes, FLOPs, time and memory, on machines that are here or only named."""
