"""Messages from chat services: what arrives, who may write, and which session it is for."""
