//! The hypervisor that this host runs under, as its CPU reports it.

use crate::sys::hypervisor_signature;

/// The signature of QEMU's emulator (TCG).
const TCG_VENDOR: [u8; 12] = *b"TCGTCGTCGTCG";

/// Returns whether QEMU's emulator executes this host's instructions. A virtualization extension on
/// such a host is itself emulated.
pub fn is_emulated() -> bool {
    is_emulator(hypervisor_signature())
}

fn is_emulator(signature: Option<[u32; 3]>) -> bool {
    let bytes = signature.map(|registers| registers.map(u32::to_le_bytes));
    bytes.is_some_and(|bytes| bytes.concat() == TCG_VENDOR)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_qemus_emulator_counts_as_emulated() {
        let registers = |vendor: &[u8; 12]| {
            let word = |at| u32::from_le_bytes(*vendor[at..].first_chunk().expect("4 bytes"));
            Some([0, 4, 8].map(word))
        };
        assert!(is_emulator(registers(&TCG_VENDOR)));
        assert!(!is_emulator(registers(b"KVMKVMKVM\0\0\0")));
        assert!(!is_emulator(None));
    }
}
