"""Publisher and subscriber: weights from trainers to inference workers."""
