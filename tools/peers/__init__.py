"""What `tools/compare_peers.py` is made of: one adapter per engine, and the rounds in which the engines take turns."""
