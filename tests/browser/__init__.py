"""Browser tests; the browser is a package fixture that closes after the last test."""
