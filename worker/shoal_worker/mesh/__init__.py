"""Models that are cut along several axes at once: pipeline x tensor x data. What strategies/mesh.py trains."""
