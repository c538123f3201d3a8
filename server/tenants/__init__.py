"""Identifies tenants and limits what they may do, and how much: keys, scopes, sessions, quotas, rate limits."""
