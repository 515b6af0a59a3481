//! Second-level paging of KVM, which VMs with vCPUs on several hosts need.
//!
//! Without it KVM keeps shadow page tables. A shadow of a guest page table that is in sync is not
//! looked at again when the guest flushes a translation, whatever has happened to the page.

use std::fmt;
use std::fs;
use std::path::Path;

use crate::error::MachineError;

/// A parameter of a module of KVM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvmParameter {
    /// The module.
    pub module: &'static str,
    /// The parameter.
    pub name: &'static str,
}

impl fmt::Display for KvmParameter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.module, self.name)
    }
}

const PARAMETERS: [KvmParameter; 2] = [
    KvmParameter {
        module: "kvm_intel",
        name: "ept",
    },
    KvmParameter {
        module: "kvm_amd",
        name: "npt",
    },
];

/// Returns the parameter that has switched second-level paging off on the host whose file systems are
/// under `root`, if one has.
#[must_use]
pub fn second_level_paging_off(root: &Path) -> Option<KvmParameter> {
    PARAMETERS
        .into_iter()
        .find(|KvmParameter { module, name }| {
            let file = root.join(format!("sys/module/{module}/parameters/{name}"));
            let value = fs::read_to_string(file).unwrap_or_default();
            matches!(value.trim(), "N" | "0")
        })
}

/// Checks that this host has it.
pub(crate) fn check() -> Result<(), MachineError> {
    match second_level_paging_off(Path::new("/")) {
        None => Ok(()),
        Some(parameter) => Err(MachineError::Nodes {
            reason: format!(
                "{parameter} is off, and without it KVM does not follow pages that other hosts take; \
                 load {} with {}=1",
                parameter.module, parameter.name
            ),
        }),
    }
}
