"""Code that server and clients share: settings, messages, and local training with its examples, attacks and memory cap.

This package may import models, federated_data and device_profiles.
"""
