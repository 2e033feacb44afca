"""What a run will do, before it starts: time, memory and layouts, read from its program. Pure Python, no torch."""
