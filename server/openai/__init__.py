"""Translates OpenAI's API into requests to our samplers, and their results into OpenAI's responses."""
