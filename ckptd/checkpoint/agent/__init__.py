"""The node process: keeps snapshots, writes them to the tiers, and outlives the trainers."""
