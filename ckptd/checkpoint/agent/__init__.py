"""The node process (agent): keeps snapshots, writes them to tiers, outlives the trainers."""
