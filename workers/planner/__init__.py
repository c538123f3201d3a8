"""Estimates the bytes that each rank of a layout needs, and finds layouts that fit. Imports no torch."""
