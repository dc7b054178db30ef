"""What tests share: fixtures, servers that speak real protocols, and checks."""
