"""The algorithms. No file below this folder imports a framework; what they need of one they ask of a ``Platform``."""
