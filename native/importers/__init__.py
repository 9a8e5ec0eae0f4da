"""Importers turn other formats into `.tinyloop` artifacts, one file per format; none is needed to serve."""
