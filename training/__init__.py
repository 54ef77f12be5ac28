"""What server and clients share: settings, messages, and the local training loop with its examples, attacks and memory cap.

May import models, federated_data and device_profiles.
"""
