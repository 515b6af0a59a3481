//! The ELF file from which a guest is booted.

/// Load address of the guests' code.
pub const ENTRY: u64 = 0x10_0000;

/// Returns an ELF kernel with `code` at [`ENTRY`].
#[must_use]
pub fn elf(code: &[u8]) -> Vec<u8> {
    let len = code.len() as u64;
    let mut bytes = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    // ET_EXEC, EM_X86_64, EV_CURRENT; entry, program headers, no sections; flags.
    bytes.extend([2, 0, 62, 0, 1, 0, 0, 0]);
    for word in [ENTRY, 64, 0] {
        bytes.extend(word.to_le_bytes());
    }
    bytes.extend([0, 0, 0, 0, 64, 0, 56, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    // PT_LOAD, readable, writable, executable.
    bytes.extend([1, 0, 0, 0, 7, 0, 0, 0]);
    for word in [120, ENTRY, ENTRY, len, len, 4096] {
        bytes.extend(word.to_le_bytes());
    }
    bytes.extend(code);
    bytes
}
