"""What every slice that imports torch uses: devices, the board of ranks."""
