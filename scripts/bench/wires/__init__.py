"""The candidates for the wire of the service: each sends an array to a server, which adds it up, and gets the sum."""
