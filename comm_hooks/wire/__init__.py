"""What payloads are made of: coded places and values, headers, and one layout for all of it."""
