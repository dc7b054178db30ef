"""Models of other APIs, on pydantic-ai's model layer."""
