"""The dashboard: pages for a browser, with everything that they need in this package."""
