"""What payloads are made of: packed bits, coded indices, and one layout for all of it."""
