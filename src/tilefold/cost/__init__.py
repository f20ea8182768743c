"""What a call costs before it runs: bytes, FLOPs, time and memory, on this machine or a named one."""
