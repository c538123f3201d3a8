"""The commands of `trainhouse`."""
