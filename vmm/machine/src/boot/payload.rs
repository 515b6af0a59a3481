//! Unpacks the compressed kernel inside a bzImage.
//!
//! Linux, Documentation/arch/x86/boot.rst, fields `payload_offset` and `payload_length`: the
//! payload is an ELF file compressed by one of the formats below. All but gzip are followed by
//! the uncompressed size in 4 bytes, little endian.

use std::io::{self, Read};

use thiserror::Error;

/// Limit of an unpacked kernel: several times the largest that distributions ship (about 100 MiB),
/// so that a corrupt image cannot exhaust the host's memory.
pub const KERNEL_BYTES_MAX: u64 = 512 << 20;

/// Limit of memory for the xz and lzma decoders; kernels are compressed with dictionaries of up to
/// 128 MiB.
const XZ_MEMORY_BYTES_MAX: u64 = 256 << 20;

/// Block size of lz4's legacy frame format, which kernels use.
const LZ4_LEGACY_BLOCK_BYTES: usize = 8 << 20;

/// Why a payload was not unpacked.
#[derive(Debug, Error)]
pub(crate) enum PayloadError {
    /// The format is unknown.
    #[error("unknown compression")]
    UnknownFormat,
    /// The format is known, but the payload exceeds a limit of its decoder.
    #[error("{format} payload that cannot be unpacked here")]
    Unsupported {
        /// Name of the format.
        format: &'static str,
        /// The decoder's error.
        #[source]
        source: io::Error,
    },
    /// The payload is corrupt.
    #[error("{format} payload is corrupt")]
    Corrupt {
        /// Name of the format.
        format: &'static str,
        /// The decoder's error.
        #[source]
        source: io::Error,
    },
    /// The unpacked kernel exceeds [`KERNEL_BYTES_MAX`].
    #[error("{format} payload unpacks to more than {KERNEL_BYTES_MAX} bytes")]
    TooLarge {
        /// Name of the format.
        format: &'static str,
    },
}

/// Formats, recognized by their first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Plain,
    Gzip,
    Xz,
    Lzma,
    Lz4Legacy,
    Zstd,
}

impl Format {
    fn of(payload: &[u8]) -> Option<Self> {
        const MAGICS: [(&[u8], Format); 6] = [
            (b"\x7fELF", Format::Plain),
            (b"\x1f\x8b", Format::Gzip),
            (b"\xfd7zXZ\0", Format::Xz),
            (b"\x5d\0\0", Format::Lzma),
            (b"\x02\x21\x4c\x18", Format::Lz4Legacy),
            (b"\x28\xb5\x2f\xfd", Format::Zstd),
        ];
        MAGICS
            .iter()
            .find(|(magic, _)| payload.starts_with(magic))
            .map(|(_, format)| *format)
    }

    fn name(self) -> &'static str {
        match self {
            Self::Plain => "uncompressed",
            Self::Gzip => "gzip",
            Self::Xz => "xz",
            Self::Lzma => "lzma",
            Self::Lz4Legacy => "lz4",
            Self::Zstd => "zstd",
        }
    }
}

/// Unpacks the payload of a bzImage.
pub(crate) fn unpack(payload: &[u8]) -> Result<Vec<u8>, PayloadError> {
    let format = Format::of(payload).ok_or(PayloadError::UnknownFormat)?;
    let name = format.name();
    let corrupt = |source| PayloadError::Corrupt {
        format: name,
        source,
    };
    let unsupported = |source| PayloadError::Unsupported {
        format: name,
        source,
    };
    // Without the appended size, which the decoders would take for another block or stream.
    let without_size = &payload[..payload.len() - payload.len().min(4)];
    let size_hint = payload
        .last_chunk()
        .map_or(0, |size| u64::from(u32::from_le_bytes(*size)));
    let read = |reader: &mut dyn Read| {
        read_limited(reader, size_hint)
            .map_err(corrupt)?
            .ok_or(PayloadError::TooLarge { format: name })
    };
    match format {
        Format::Plain => Ok(payload.to_vec()),
        Format::Gzip => read(&mut flate2::read::GzDecoder::new(payload)),
        Format::Xz | Format::Lzma => {
            let stream = match format {
                Format::Xz => liblzma::stream::Stream::new_stream_decoder(XZ_MEMORY_BYTES_MAX, 0),
                _ => liblzma::stream::Stream::new_lzma_decoder(XZ_MEMORY_BYTES_MAX),
            }
            .map_err(|error| unsupported(error.into()))?;
            read(&mut liblzma::read::XzDecoder::new_stream(
                without_size,
                stream,
            ))
        }
        Format::Lz4Legacy => unpack_lz4_legacy(without_size, size_hint)
            .map_err(corrupt)?
            .ok_or(PayloadError::TooLarge { format: name }),
        Format::Zstd => {
            let mut decoder = ruzstd::decoding::StreamingDecoder::new(without_size)
                .map_err(|error| unsupported(io::Error::other(error.to_string())))?;
            read(&mut decoder)
        }
    }
}

/// Reads to the end. Returns `None` beyond [`KERNEL_BYTES_MAX`] bytes.
fn read_limited(reader: &mut dyn Read, size_hint: u64) -> io::Result<Option<Vec<u8>>> {
    let mut bytes = buffer(size_hint);
    let read = reader.take(KERNEL_BYTES_MAX + 1).read_to_end(&mut bytes)?;
    let read = u64::try_from(read).unwrap_or(u64::MAX);
    Ok((read <= KERNEL_BYTES_MAX).then_some(bytes))
}

/// Allocates a buffer for about `size_hint` bytes, a number from the image that is not trusted.
fn buffer(size_hint: u64) -> Vec<u8> {
    let capacity = size_hint.min(KERNEL_BYTES_MAX / 4);
    Vec::with_capacity(usize::try_from(capacity).unwrap_or(0))
}

/// Unpacks lz4's legacy frame format: a magic number of 4 bytes, then blocks, each preceded by its
/// compressed size; each block except the last unpacks to 8 MiB.
fn unpack_lz4_legacy(frame: &[u8], size_hint: u64) -> io::Result<Option<Vec<u8>>> {
    let corrupt = |text| io::Error::new(io::ErrorKind::InvalidData, text);
    let mut rest = frame.get(4..).unwrap_or_default();
    let mut bytes = buffer(size_hint);
    let mut block = vec![0; LZ4_LEGACY_BLOCK_BYTES];
    while let Some((size, after)) = rest.split_first_chunk() {
        let size = usize::try_from(u32::from_le_bytes(*size))
            .map_err(|_| corrupt("a block is larger than memory"))?;
        let (packed, next) = after
            .split_at_checked(size)
            .ok_or_else(|| corrupt("a block extends past the end"))?;
        let unpacked = lz4_flex::block::decompress_into(packed, &mut block)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.to_string()))?;
        bytes.extend_from_slice(&block[..unpacked]);
        if u64::try_from(bytes.len()).unwrap_or(u64::MAX) > KERNEL_BYTES_MAX {
            return Ok(None);
        }
        rest = next;
    }
    if !rest.is_empty() {
        return Err(corrupt("bytes after the last block"));
    }
    Ok(Some(bytes))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use liblzma::stream::{Check, Filters, LzmaOptions, Stream};
    use proptest::prelude::*;

    use super::*;

    /// Returns bytes that start like an ELF file and are slightly compressible.
    fn sample(len: usize) -> Vec<u8> {
        let mut bytes = b"\x7fELF".to_vec();
        bytes.extend((0..len).map(|i| u8::try_from((i * i / 7) % 253).unwrap()));
        bytes
    }

    fn with_size(mut packed: Vec<u8>, len: usize) -> Vec<u8> {
        packed.extend(u32::try_from(len).unwrap().to_le_bytes());
        packed
    }

    pub(crate) fn lz4_legacy(bytes: &[u8]) -> Vec<u8> {
        let mut packed = b"\x02\x21\x4c\x18".to_vec();
        for block in bytes.chunks(LZ4_LEGACY_BLOCK_BYTES) {
            let block = lz4_flex::block::compress(block);
            packed.extend(u32::try_from(block.len()).unwrap().to_le_bytes());
            packed.extend(block);
        }
        with_size(packed, bytes.len())
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    /// Compresses as the kernel's build does: with CRC32, and the x86 filter before LZMA2.
    fn xz(bytes: &[u8]) -> Vec<u8> {
        let mut filters = Filters::new();
        filters.x86();
        filters.lzma2(&LzmaOptions::new_preset(1).unwrap());
        let stream = Stream::new_stream_encoder(&filters, Check::Crc32).unwrap();
        let mut encoder = liblzma::write::XzEncoder::new_stream(Vec::new(), stream);
        encoder.write_all(bytes).unwrap();
        with_size(encoder.finish().unwrap(), bytes.len())
    }

    fn lzma(bytes: &[u8]) -> Vec<u8> {
        let options = LzmaOptions::new_preset(1).unwrap();
        let stream = Stream::new_lzma_encoder(&options).unwrap();
        let mut encoder = liblzma::write::XzEncoder::new_stream(Vec::new(), stream);
        encoder.write_all(bytes).unwrap();
        with_size(encoder.finish().unwrap(), bytes.len())
    }

    fn zstd(bytes: &[u8]) -> Vec<u8> {
        let packed =
            ruzstd::encoding::compress_to_vec(bytes, ruzstd::encoding::CompressionLevel::Fastest);
        with_size(packed, bytes.len())
    }

    #[test]
    fn every_format_of_kernels_is_unpacked() {
        let bytes = sample(300_000);
        for packed in [
            gzip(&bytes),
            xz(&bytes),
            lzma(&bytes),
            lz4_legacy(&bytes),
            zstd(&bytes),
            bytes.clone(),
        ] {
            let format = Format::of(&packed).unwrap();
            let unpacked = unpack(&packed).unwrap();
            assert!(unpacked == bytes, "{format:?}");
        }
    }

    #[test]
    fn lz4_of_several_blocks_is_unpacked() {
        let bytes = sample(LZ4_LEGACY_BLOCK_BYTES * 2 + 5);
        assert!(unpack(&lz4_legacy(&bytes)).unwrap() == bytes);
    }

    #[test]
    fn truncated_payloads_are_corrupt() {
        let bytes = sample(300_000);
        for packed in [gzip(&bytes), xz(&bytes), lz4_legacy(&bytes), zstd(&bytes)] {
            for keep in [packed.len() / 2, packed.len() - 9, 20] {
                let error = unpack(&packed[..keep]).unwrap_err();
                let corrupt = matches!(
                    error,
                    PayloadError::Corrupt { .. } | PayloadError::Unsupported { .. }
                );
                assert!(corrupt, "{error}");
            }
        }
    }

    proptest! {
        #[test]
        fn any_payload_is_survived(magic in 0usize..6, bytes: Vec<u8>) {
            let magics: [&[u8]; 6] = [
                b"\x1f\x8b", b"\xfd7zXZ\0", b"\x5d\0\0", b"\x02\x21\x4c\x18", b"\x28\xb5\x2f\xfd", b"",
            ];
            let payload = [magics[magic], &bytes].concat();
            let _ = unpack(&payload);
        }
    }
}
