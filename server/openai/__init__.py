"""OpenAI's API in the words of our samplers."""
