"""What is read from compiled and traced programs: bytes on the wire, and checks."""
