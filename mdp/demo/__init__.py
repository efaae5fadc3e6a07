"""The demo: four cameras round an item, in a browser or in text, on this machine."""
