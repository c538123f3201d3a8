"""What survives a crash: accepted operations, their results, snapshots."""
