"""Contract tests and helpers that authors of stores, launchers, carriers, transports use."""
