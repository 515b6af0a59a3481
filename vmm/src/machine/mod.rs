//! The virtual machine.
