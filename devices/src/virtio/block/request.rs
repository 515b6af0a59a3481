//! One request to a disk: it is checked, executed, and answered by a status.

use std::io::{self, Read, Write};
use std::sync::atomic::Ordering;

use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_ID_BYTES, VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP,
    VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN,
    VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES, VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP,
};
use virtio_queue::{Reader, Writer};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::{
    Block, DISCARD_SECTORS_MAX, RANGES_MAX, SECTOR_BYTES, SEGMENT_BYTES_MAX, SEGMENTS_MAX,
    ZEROES_SECTORS_MAX,
};
use crate::virtio::{Buffers, Chain, lost};

/// Limit of bytes of one read or write, from the configuration.
const REQUEST_BYTES_MAX: u64 = SEGMENT_BYTES_MAX as u64 * SEGMENTS_MAX as u64;

/// How much is copied at once between guest and disk.
const COPY_BYTES: usize = 256 << 10;

/// Header bytes before the data: type, reserved, first sector (section 5.2.6).
const HEADER_BYTES: usize = 16;

/// Bytes per part of a discard or write-zeroes request.
const RANGE_BYTES: usize = 16;

/// Why a request fails.
#[derive(Debug)]
enum Refusal {
    /// The request is invalid.
    Invalid,
    /// The request type is unknown.
    Unsupported,
    /// The host failed at this action.
    Host(&'static str, io::Error),
}

impl Refusal {
    fn status(&self) -> u32 {
        match self {
            Self::Unsupported => VIRTIO_BLK_S_UNSUPP,
            Self::Invalid | Self::Host(..) => VIRTIO_BLK_S_IOERR,
        }
    }
}

/// Maps an error of the host, with the action that failed.
fn host(action: &'static str) -> impl FnOnce(io::Error) -> Refusal {
    move |error| Refusal::Host(action, error)
}

/// The length was checked before, so all bytes are in guest memory.
fn short(_: io::Error) -> Refusal {
    Refusal::Invalid
}

/// A range of the disk, in bytes.
#[derive(Clone, Copy, Debug)]
struct Range {
    offset: u64,
    bytes: u64,
    unmap: bool,
}

impl Block {
    /// Executes the request of a chain through `buffer`, and returns how many bytes were written to
    /// the chain.
    pub(super) fn answer(
        &self,
        chain: &Chain<'_>,
        memory: &GuestMemoryMmap,
        buffer: &mut Vec<u8>,
    ) -> u32 {
        let Some(Buffers {
            mut from_driver,
            mut to_driver,
        }) = Buffers::of(chain, memory)
        else {
            return refuse_outside(chain, memory);
        };
        // The last byte is the status. Without room for it no answer is possible.
        let all = to_driver.available_bytes();
        let Some(data) = all.checked_sub(1) else {
            return 0;
        };
        let Ok(mut status_byte) = to_driver.split_at(data) else {
            return 0;
        };
        let status = match self.execute(&mut from_driver, &mut to_driver, buffer) {
            Ok(()) => VIRTIO_BLK_S_OK,
            Err(refusal) => {
                match &refusal {
                    Refusal::Host(action, error) => self.warn(action, error),
                    refusal => tracing::debug!(?refusal, name = self.name, "a request is refused"),
                }
                refusal.status()
            }
        };
        if status_byte.write_all(&status.to_le_bytes()[..1]).is_err() {
            return 0;
        }
        u32::try_from(all).unwrap_or(u32::MAX)
    }

    fn execute(
        &self,
        from_driver: &mut Reader<'_>,
        to_driver: &mut Writer<'_>,
        buffer: &mut Vec<u8>,
    ) -> Result<(), Refusal> {
        let mut header = [0; HEADER_BYTES];
        from_driver.read_exact(&mut header).map_err(short)?;
        let [t0, t1, t2, t3, _, _, _, _, sector @ ..] = header;
        let kind = u32::from_le_bytes([t0, t1, t2, t3]);
        let sector = u64::from_le_bytes(sector);
        self.disk.check_size().map_err(host("be used"))?;
        match kind {
            VIRTIO_BLK_T_IN => {
                let range = self.range(sector, to_driver.available_bytes())?;
                self.read(range, to_driver, buffer)
            }
            VIRTIO_BLK_T_OUT => {
                let range = self.range(sector, from_driver.available_bytes())?;
                self.check_writable()?;
                self.write(range, from_driver, buffer)?;
                self.written()
            }
            VIRTIO_BLK_T_FLUSH => self.disk.flush().map_err(host("be flushed")),
            VIRTIO_BLK_T_GET_ID => {
                let mut id = [0; VIRTIO_BLK_ID_BYTES as usize];
                for (byte, of_name) in id.iter_mut().zip(self.name.bytes()) {
                    *byte = of_name;
                }
                let there = to_driver.available_bytes().min(id.len());
                to_driver.write_all(&id[..there]).map_err(short)
            }
            VIRTIO_BLK_T_DISCARD => {
                self.check_writable()?;
                let ranges = self.ranges(from_driver, DISCARD_SECTORS_MAX)?;
                if ranges.iter().any(|range| range.unmap) {
                    // A flag that discards do not support.
                    return Err(Refusal::Unsupported);
                }
                for range in ranges {
                    self.disk
                        .discard(range.offset, range.bytes)
                        .map_err(host("discard"))?;
                }
                self.written()
            }
            VIRTIO_BLK_T_WRITE_ZEROES => {
                self.check_writable()?;
                for range in self.ranges(from_driver, ZEROES_SECTORS_MAX)? {
                    let written = self
                        .disk
                        .write_zeroes(range.offset, range.bytes, range.unmap)
                        .map_err(host("write zeroes"))?;
                    self.count(0, written);
                }
                self.written()
            }
            _ => Err(Refusal::Unsupported),
        }
    }

    fn check_writable(&self) -> Result<(), Refusal> {
        if self.disk.is_read_only() {
            return Err(Refusal::Invalid);
        }
        Ok(())
    }

    /// After a write: stores the data unless the driver flushes explicitly.
    fn written(&self) -> Result<(), Refusal> {
        if self.driver_flushes.load(Ordering::Relaxed) {
            return Ok(());
        }
        self.disk.flush().map_err(host("be flushed"))
    }

    /// The range of `bytes` bytes at `sector`, if it is whole sectors inside the disk.
    fn range(&self, sector: u64, bytes: usize) -> Result<Range, Refusal> {
        let bytes = u64::try_from(bytes).map_err(|_| Refusal::Invalid)?;
        if !bytes.is_multiple_of(SECTOR_BYTES) || bytes > REQUEST_BYTES_MAX {
            return Err(Refusal::Invalid);
        }
        self.on_disk(sector, bytes, false)
    }

    fn on_disk(&self, sector: u64, bytes: u64, unmap: bool) -> Result<Range, Refusal> {
        let offset = sector.checked_mul(SECTOR_BYTES);
        let offset = offset.filter(|offset| {
            offset
                .checked_add(bytes)
                .is_some_and(|end| end <= self.disk.bytes())
        });
        Ok(Range {
            offset: offset.ok_or(Refusal::Invalid)?,
            bytes,
            unmap,
        })
    }

    /// The parts of a discard or write-zeroes request, all checked.
    fn ranges(&self, from_driver: &mut Reader<'_>, most: u32) -> Result<Vec<Range>, Refusal> {
        let bytes = from_driver.available_bytes();
        let count = bytes / RANGE_BYTES;
        let limit = usize::try_from(RANGES_MAX).unwrap_or(0);
        if !bytes.is_multiple_of(RANGE_BYTES) || count == 0 || count > limit {
            return Err(Refusal::Invalid);
        }
        let mut ranges = Vec::with_capacity(count);
        for _ in 0..count {
            let mut raw = [0; RANGE_BYTES];
            from_driver.read_exact(&mut raw).map_err(short)?;
            let [s @ .., n0, n1, n2, n3, f0, f1, f2, f3] = raw;
            let sectors = u32::from_le_bytes([n0, n1, n2, n3]);
            let flags = u32::from_le_bytes([f0, f1, f2, f3]);
            if flags & !VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP != 0 {
                return Err(Refusal::Unsupported);
            }
            if sectors == 0 || sectors > most {
                return Err(Refusal::Invalid);
            }
            ranges.push(self.on_disk(
                u64::from_le_bytes(s),
                u64::from(sectors) * SECTOR_BYTES,
                flags != 0,
            )?);
        }
        Ok(ranges)
    }

    fn read(
        &self,
        range: Range,
        to_driver: &mut Writer<'_>,
        buffer: &mut Vec<u8>,
    ) -> Result<(), Refusal> {
        self.count(0, range.bytes);
        for (offset, count) in pieces(range) {
            buffer.resize(COPY_BYTES, 0);
            let piece = &mut buffer[..count];
            self.disk.read(piece, offset).map_err(host("be read"))?;
            to_driver.write_all(piece).map_err(short)?;
        }
        Ok(())
    }

    fn write(
        &self,
        range: Range,
        from_driver: &mut Reader<'_>,
        buffer: &mut Vec<u8>,
    ) -> Result<(), Refusal> {
        self.count(0, range.bytes);
        for (offset, count) in pieces(range) {
            buffer.resize(COPY_BYTES, 0);
            let piece = &mut buffer[..count];
            from_driver.read_exact(piece).map_err(short)?;
            self.disk.write(piece, offset).map_err(host("be written"))?;
        }
        Ok(())
    }
}

/// Splits a range into offsets and lengths of up to [`COPY_BYTES`].
fn pieces(range: Range) -> impl Iterator<Item = (u64, usize)> {
    let end = range.offset + range.bytes;
    let step = COPY_BYTES as u64;
    (0..range.bytes.div_ceil(step)).filter_map(move |piece| {
        let offset = range.offset + piece * step;
        let count = usize::try_from((end - offset).min(step)).ok()?;
        Some((offset, count))
    })
}

/// Answers a request that is partly outside the guest's memory or lost, if its status byte is not.
fn refuse_outside(chain: &Chain<'_>, memory: &GuestMemoryMmap) -> u32 {
    let written = chain.clone().filter(|d| d.is_write_only()).last();
    let place = written.and_then(|last| {
        let after = u64::from(last.len().checked_sub(1)?);
        last.addr().0.checked_add(after)
    });
    let Some(place) = place else { return 0 };
    if !lost::can_use(memory, GuestAddress(place), 1) {
        return 0;
    }
    let [status, ..] = VIRTIO_BLK_S_IOERR.to_le_bytes();
    match memory.write_obj(status, GuestAddress(place)) {
        Ok(()) => 1,
        Err(_) => 0,
    }
}
