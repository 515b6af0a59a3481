//! The libraries that the program is linked with, according to its ELF header.

use std::fs;

/// Types of program headers, and tags of dynamic entries (System V ABI, chapter 5).
const PT_LOAD: u64 = 1;
const PT_DYNAMIC: u64 = 2;
const DT_NEEDED: u64 = 1;
const DT_STRTAB: u64 = 5;

/// Returns a little-endian number of this many bytes.
fn number(file: &[u8], at: usize, bytes: usize) -> u64 {
    let mut whole = [0; 8];
    whole[..bytes].copy_from_slice(&file[at..at + bytes]);
    u64::from_le_bytes(whole)
}

fn place(number: u64) -> usize {
    usize::try_from(number).unwrap()
}

/// Returns the names of the shared libraries that a 64-bit program is linked with.
fn needed(file: &[u8]) -> Vec<String> {
    assert_eq!(&file[..5], b"\x7fELF\x02", "a program of 64 bits");
    let (first, size, count) = (
        place(number(file, 32, 8)),
        place(number(file, 54, 2)),
        place(number(file, 56, 2)),
    );
    // Type, file offset, address, and size in the file.
    let headers: Vec<_> = (0..count)
        .map(|index| first + index * size)
        .map(|at| {
            let field = |offset| number(file, at + offset, 8);
            (number(file, at, 4), field(8), field(16), field(32))
        })
        .collect();
    let dynamic = headers.iter().find(|header| header.0 == PT_DYNAMIC);
    let (_, start, _, bytes) = *dynamic.expect("a dynamic program");
    let entries: Vec<(u64, u64)> = (place(start)..place(start + bytes))
        .step_by(16)
        .map(|at| (number(file, at, 8), number(file, at + 8, 8)))
        .collect();
    let table = entries.iter().find(|entry| entry.0 == DT_STRTAB);
    let (_, table) = *table.expect("a table of strings");
    let (_, from, address, _) = *headers
        .iter()
        .find(|(kind, _, address, bytes)| {
            *kind == PT_LOAD && (*address..address + bytes).contains(&table)
        })
        .expect("the table is in the file");
    let strings = &file[place(from + table - address)..];
    entries
        .iter()
        .filter(|entry| entry.0 == DT_NEEDED)
        .map(|(_, offset)| {
            let name = strings[place(*offset)..].split(|byte| *byte == 0).next();
            String::from_utf8_lossy(name.unwrap()).into_owned()
        })
        .collect()
}

#[test]
fn rdma_libraries_are_loaded_when_needed_and_not_linked() {
    let program = fs::read(env!("CARGO_BIN_EXE_ssi-hv")).unwrap();
    let libraries = needed(&program);
    assert!(
        libraries.iter().any(|library| library == "libc.so.6"),
        "{libraries:?}"
    );
    let rdma = |library: &String| library.contains("ibverbs") || library.contains("rdmacm");
    assert!(!libraries.iter().any(rdma), "{libraries:?}");
}
