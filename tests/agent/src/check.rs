//! Checks the host's capabilities for a monitor.

use std::io;

use crate::sys::{Kvm, Uffd};

/// Creates a VM and a userfaultfd that handles kernel faults, and describes each in one line.
pub fn run() -> io::Result<()> {
    let kvm = Kvm::open()?;
    drop(kvm.create_vm()?);
    println!("kvm api={}", kvm.api_version()?);
    let (_, features) = Uffd::create(0)?;
    println!("userfaultfd features={features:#x}");
    Ok(())
}
