"""Access to the service: tokens, sessions of browsers, roles, and the guard that every request passes."""
