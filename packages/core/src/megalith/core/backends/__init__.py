"""What runs a program: all ranks in this process, or a process a rank."""
