//! Extracts the ELF kernel from a compressed `bzImage`.
//!
//! The setup header (Documentation/arch/x86/boot.rst in the kernel's source) locates the compressed
//! payload: `setup_sects` at 0x1f1, the magic `HdrS` at 0x202, the protocol version at 0x206,
//! `payload_offset` at 0x248 and `payload_length` at 0x24c; the last two are relative to the
//! protected-mode code, and exist since protocol 2.08.

use std::path::Path;
use std::process::Command;

use crate::{ImageError, command};

/// Limit of the ELF's size: stock kernels have 30 to 80 MiB.
const VMLINUX_BYTES_MAX: usize = 1 << 30;

/// Magic bytes of payloads, the command that unpacks them and its package, and whether the kernel's
/// build appends the unpacked size (it does except for gzip, whose format includes it).
const FORMATS: &[(&[u8], &[&str], &str, bool)] = &[
    (&[0x02, 0x21, 0x4c, 0x18], &["lz4", "-d", "-c"], "lz4", true),
    (
        &[0xfd, b'7', b'z', b'X', b'Z', 0],
        &["xz", "-d", "-c"],
        "xz-utils",
        true,
    ),
    (
        &[0x28, 0xb5, 0x2f, 0xfd],
        &["zstd", "-d", "-c", "-q"],
        "zstd",
        true,
    ),
    (&[0x1f, 0x8b, 0x08], &["gzip", "-d", "-c"], "gzip", false),
];

/// Returns the ELF kernel in these bytes of the file `path`; an ELF is returned unchanged.
///
/// # Errors
/// Fails when the bytes are not a bzImage, or its payload does not unpack to an ELF of the size
/// that the image states.
pub fn extract(path: &Path, image: &[u8]) -> Result<Vec<u8>, ImageError> {
    let bad = |reason: String| ImageError::NotBzImage {
        path: path.to_path_buf(),
        reason,
    };
    if image.starts_with(b"\x7fELF") {
        return Ok(image.to_vec());
    }
    let payload = payload(image).map_err(&bad)?;
    let (_, argv, package, size_appended) = FORMATS
        .iter()
        .find(|(magic, ..)| payload.starts_with(magic))
        .ok_or_else(|| {
            bad(format!(
                "unknown compression (payload begins {:02x?})",
                &payload[..4]
            ))
        })?;
    let (body, size) = if *size_appended {
        let (body, tail) = payload.split_at(payload.len() - 4);
        (body, read_u32(tail, 0))
    } else {
        (payload, None)
    };
    let remedy = "the kernel image may be damaged: fetch it again";
    let elf = command::filter(
        Command::new(argv[0]).args(&argv[1..]),
        body,
        package,
        remedy,
    )?;
    if !elf.starts_with(b"\x7fELF") {
        return Err(bad("its payload is not an ELF file".into()));
    }
    match size {
        Some(size) if size != elf.len() => Err(bad(format!(
            "its payload has {} bytes, but {size} are stated",
            elf.len()
        ))),
        _ if elf.len() > VMLINUX_BYTES_MAX => Err(bad(format!(
            "its payload has {} bytes, {VMLINUX_BYTES_MAX} is the limit",
            elf.len()
        ))),
        _ => Ok(elf),
    }
}

fn payload(image: &[u8]) -> Result<&[u8], String> {
    if image.get(0x202..0x206) != Some(b"HdrS") {
        return Err("not a bzImage: no \"HdrS\" at offset 0x202".into());
    }
    if read_u16(image, 0x206).is_none_or(|version| version < 0x208) {
        return Err("boot protocol older than 2.08".into());
    }
    let sectors = match image[0x1f1] {
        0 => 4,
        n => usize::from(n),
    };
    let start = (sectors + 1) * 512;
    let offset = read_u32(image, 0x248).ok_or("truncated setup header")?;
    let length = read_u32(image, 0x24c).ok_or("truncated setup header")?;
    let from = start.saturating_add(offset);
    let payload = image.get(from..from.saturating_add(length));
    payload.filter(|p| p.len() > 8).ok_or_else(|| {
        format!(
            "truncated: payload of {length} bytes at {from}, but the file has {}",
            image.len()
        )
    })
}

fn read_u16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn read_u32(bytes: &[u8], at: usize) -> Option<usize> {
    usize::try_from(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A bzImage with one setup sector around an ELF, packed by `argv`.
    fn bz_image(elf: &[u8], argv: &[&str], appended: Option<u32>) -> Vec<u8> {
        let mut payload =
            command::filter(Command::new(argv[0]).args(&argv[1..]), elf, "", "").unwrap();
        if let Some(size) = appended {
            payload.extend(size.to_le_bytes());
        }
        let mut image = vec![0; 1024 + 16];
        image[0x1f1] = 1;
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[0x206..0x208].copy_from_slice(&0x20f_u16.to_le_bytes());
        image[0x248..0x24c].copy_from_slice(&16_u32.to_le_bytes());
        image[0x24c..0x250].copy_from_slice(&u32::try_from(payload.len()).unwrap().to_le_bytes());
        image.extend(payload);
        image.extend([0; 100]);
        image
    }

    fn elf() -> Vec<u8> {
        let mut elf = b"\x7fELF".to_vec();
        elf.extend((0..100_000_u32).flat_map(u32::to_le_bytes));
        elf
    }

    #[test]
    fn every_compression_gives_the_elf_back() {
        let elf = elf();
        let size = Some(u32::try_from(elf.len()).unwrap());
        for (argv, size) in [
            (vec!["lz4", "-l", "-c"], size),
            (vec!["xz", "-c", "--check=crc32"], size),
            (vec!["zstd", "-c", "-q"], size),
            (vec!["gzip", "-c"], None),
        ] {
            let image = bz_image(&elf, &argv, size);
            assert!(extract(Path::new("k"), &image).unwrap() == elf, "{argv:?}");
        }
        assert!(extract(Path::new("k"), &elf).unwrap() == elf);
    }

    #[test]
    fn truncated_and_foreign_files_are_refused_with_the_reason() {
        let elf = elf();
        let image = bz_image(&elf, &["gzip", "-c"], None);
        for (bytes, reason) in [
            (&b"hello"[..], "HdrS"),
            (&image[..0x206], "2.08"),
            (&image[..0x24a], "truncated"),
            (&image[..2000], "truncated: payload"),
        ] {
            let text = extract(Path::new("k"), bytes).unwrap_err().to_string();
            assert!(text.contains(reason), "{text}");
        }
        let lying = bz_image(&elf, &["xz", "-c", "--check=crc32"], Some(17));
        assert!(
            extract(Path::new("k"), &lying)
                .unwrap_err()
                .to_string()
                .contains("17 are stated")
        );
    }
}
