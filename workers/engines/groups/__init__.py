"""Workers that only sample, with copies of adapters."""
