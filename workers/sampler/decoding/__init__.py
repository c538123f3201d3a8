"""Steps of decoding."""
