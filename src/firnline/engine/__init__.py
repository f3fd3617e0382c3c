"""Decides (`epoch`) and acts (`runner`)."""
