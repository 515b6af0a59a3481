//! Tests of loading kernels of every format.

use std::io::Write;

use linux_loader::loader::bootparam::setup_header;
use proptest::prelude::*;
use vm_memory::{ByteValued, Bytes, GuestAddress};

use super::*;
use crate::boot::bzimage::{
    SETUP_HEADER_END, SETUP_HEADER_MAGIC, SETUP_HEADER_OFFSET, XLF_KERNEL_64,
};
use crate::boot::elf_check::ElfError;
use crate::boot::loaded::KernelFormat;

const MEMORY_BYTES: u64 = 8 << 20;
const ENTRY: u64 = 0x10_0000;

fn memory() -> GuestMemoryMmap {
    let bytes = usize::try_from(MEMORY_BYTES).unwrap();
    GuestMemoryMmap::from_ranges(&[(GuestAddress(0), bytes)]).unwrap()
}

fn file(bytes: &[u8]) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(bytes).unwrap();
    file
}

fn load(bytes: &[u8]) -> Result<LoadedKernel, KernelError> {
    load_kernel(file(bytes).path(), &memory(), MEMORY_BYTES)
}

/// Returns an ELF kernel with one segment of `code` at `ENTRY`, and 4096 bytes of zeroes after it.
fn elf(code: &[u8]) -> Vec<u8> {
    let len = u64::try_from(code.len()).unwrap();
    let mut bytes = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    bytes.extend(2u16.to_le_bytes());
    bytes.extend(62u16.to_le_bytes());
    bytes.extend(1u32.to_le_bytes());
    for word in [ENTRY, 64, 0] {
        bytes.extend(word.to_le_bytes());
    }
    bytes.extend(0u32.to_le_bytes());
    for half in [64u16, 56, 1, 0, 0, 0] {
        bytes.extend(half.to_le_bytes());
    }
    bytes.extend(1u32.to_le_bytes());
    bytes.extend(7u32.to_le_bytes());
    for word in [120, ENTRY, ENTRY, len, len + 4096, 4096] {
        bytes.extend(word.to_le_bytes());
    }
    bytes.extend(code);
    bytes
}

/// Returns a bzImage with `payload`, and 1024 bytes of code before it.
fn bzimage(payload: &[u8]) -> Vec<u8> {
    let header = setup_header {
        setup_sects: 1,
        header: SETUP_HEADER_MAGIC,
        version: 0x020f,
        loadflags: 1,
        code32_start: 0x10_0000,
        cmdline_size: 1000,
        xloadflags: XLF_KERNEL_64,
        payload_offset: 1024,
        payload_length: u32::try_from(payload.len()).unwrap(),
        pref_address: 0x10_0000,
        init_size: 0x10_0000,
        ..Default::default()
    };
    let mut bytes = vec![0; 1024 + 1024];
    let place = &mut bytes[SETUP_HEADER_OFFSET..][..size_of::<setup_header>()];
    place.copy_from_slice(header.as_slice());
    bytes.extend(payload);
    bytes
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

#[test]
fn an_elf_kernel_is_loaded_at_its_physical_address() {
    let memory = memory();
    let kernel = load_kernel(file(&elf(b"\xf4\xf4")).path(), &memory, MEMORY_BYTES).unwrap();
    assert_eq!(kernel.format, KernelFormat::Elf);
    assert_eq!(kernel.entry, GuestAddress(ENTRY));
    assert_eq!(kernel.end, ENTRY + 2 + 4096);
    assert_eq!(kernel.cmdline_bytes_max(), 2047);
    let mut code = [0; 3];
    memory.read_slice(&mut code, GuestAddress(ENTRY)).unwrap();
    assert_eq!(&code, b"\xf4\xf4\0");
}

#[test]
fn the_elf_kernel_in_a_bzimage_is_unpacked() {
    let kernel = load(&bzimage(&gzip(&elf(b"\xf4")))).unwrap();
    assert_eq!(kernel.format, KernelFormat::UnpackedBzImage);
    assert_eq!(kernel.entry, GuestAddress(ENTRY));
    assert_eq!(kernel.cmdline_bytes_max(), 1000);
}

#[test]
fn a_bzimage_of_unknown_compression_unpacks_itself() {
    let kernel = load(&bzimage(b"BZh91AY&SY")).unwrap();
    assert_eq!(kernel.format, KernelFormat::BzImage);
    assert_eq!(kernel.entry, GuestAddress(0x10_0200));
    assert_eq!(kernel.end, 0x20_0000);
}

#[test]
fn short_and_foreign_files_are_refused() {
    let text = load(b"not a kernel").unwrap_err().to_string();
    assert!(text.contains("is 12 bytes: too short"), "{text}");
    assert!(matches!(load(b""), Err(KernelError::TooShort { .. })));
    let error = load(&[0x55; 4096]).unwrap_err();
    assert!(matches!(error, KernelError::UnknownFormat { .. }));
    let missing = load_kernel(Path::new("/does/not/exist"), &memory(), MEMORY_BYTES);
    assert!(matches!(missing, Err(KernelError::Read { .. })));
}

#[test]
fn truncated_images_are_refused() {
    let whole = elf(&[0x90; 5000]);
    for keep in [20, 63, 64, 119, 121, whole.len() - 1] {
        let error = load(&whole[..keep]).unwrap_err();
        assert!(matches!(error, KernelError::Elf { .. }), "{keep}: {error}");
    }
    let whole = bzimage(&gzip(&whole));
    for keep in [1024, 2048, 2060, whole.len() - 1] {
        let error = load(&whole[..keep]).unwrap_err();
        assert!(matches!(error, KernelError::Truncated { .. }), "{error}");
    }
}

#[test]
fn a_corrupt_payload_is_named() {
    let mut payload = gzip(&elf(&[0x90; 50_000]));
    let middle = payload.len() / 2;
    payload[middle..middle + 8].fill(0xff);
    let error = load(&bzimage(&payload)).unwrap_err();
    assert!(matches!(error, KernelError::Corrupt { .. }), "{error}");
    let error = load(&bzimage(&gzip(b"not an ELF file"))).unwrap_err();
    assert!(matches!(error, KernelError::Corrupt { .. }), "{error}");
}

#[test]
fn kernels_that_do_not_fit_are_refused() {
    let kernel = elf(&[0x90; 5000]);
    let error = load_kernel(file(&kernel).path(), &memory(), ENTRY + 4096).unwrap_err();
    assert!(error.to_string().contains("raise --memory"), "{error}");
    let error = load_kernel(file(&bzimage(b"BZh9")).path(), &memory(), 0x11_0000).unwrap_err();
    assert!(matches!(error, KernelError::NoRoom { .. }), "{error}");
}

#[test]
fn segments_over_the_boot_structures_are_refused() {
    for address in [0u64, 0x9000, 0xf_ffff, u64::MAX - 100] {
        let mut kernel = elf(&[0x90; 5000]);
        kernel[64 + 24..64 + 32].copy_from_slice(&address.to_le_bytes());
        let error = load(&kernel).unwrap_err();
        assert!(matches!(
            error,
            KernelError::Elf {
                source: ElfError::SegmentAddress { .. },
                ..
            }
        ));
    }
}

proptest! {
    #[test]
    fn an_elf_kernel_with_changed_bytes_never_panics(
        changes in proptest::collection::vec((0usize..140, any::<u8>()), 1..8),
    ) {
        let mut kernel = elf(&[0x90; 32]);
        for (at, value) in changes {
            kernel[at] = value;
        }
        let _ = load(&kernel);
    }

    #[test]
    fn a_bzimage_with_changed_bytes_never_panics(
        changes in proptest::collection::vec((SETUP_HEADER_OFFSET..SETUP_HEADER_END, any::<u8>()), 1..8),
        packed: bool,
    ) {
        let payload = if packed { gzip(&elf(&[0x90; 32])) } else { b"BZh9".to_vec() };
        let mut image = bzimage(&payload);
        for (at, value) in changes {
            image[at] = value;
        }
        let _ = load(&image);
    }
}
