"""The watcher of a node: reads rings, reports to the daemon."""
