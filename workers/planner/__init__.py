"""The bytes that each rank of a layout needs, and which layouts fit. Imports no torch."""
