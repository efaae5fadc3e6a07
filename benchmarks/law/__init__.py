"""Fitting the accuracy law that planning uses, and measuring how far it is off."""
