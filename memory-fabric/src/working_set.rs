//! The order of a guest's first touches: recorded in one run, and used by the next of the same
//! image.
//!
//! The file, little-endian: a header of 48 bytes ([`Header`]), 8 bytes for each run of pages
//! (number of the first, count), and a CRC-32C of all that.

use crate::homes::HomeTable;
use crate::mapping::Mapping;
use crate::page::{PAGE_SIZE, PageIndex, PageRange};
use fabric_host::root::path_now;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The first bytes of a file.
const MAGIC: [u8; 8] = *b"SSIHV-WS";

/// The version of the format.
pub const VERSION: u32 = 1;

/// Limit of recorded and accepted runs: 8 MiB of file. A first touch fills up to 16 pages, so they
/// are up to 64 GiB of memory.
pub const RUNS_MAX: usize = 1 << 20;

const HEADER_BYTES: usize = size_of::<Header>();
const RUN_BYTES: usize = size_of::<U64>();
const CHECKSUM_BYTES: usize = size_of::<U32>();

#[derive(Clone, Copy, Debug, FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned)]
#[repr(C)]
struct Header {
    magic: [u8; 8],
    version: U32,
    page_bytes: U32,
    guest_bytes: U64,
    span_pages: U64,
    image_bytes: U64,
    image_checksum: U32,
    runs: U32,
}

const _: () = assert!(HEADER_BYTES == 48);

/// Identifies the guest of a recorded working set, which is useless for any other.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Subject {
    /// Bytes of guest memory.
    pub guest_bytes: u64,
    /// Pages of guest-physical address space, holes included.
    pub span_pages: u64,
    /// Bytes of the image: kernel and initial RAM disk together.
    pub image_bytes: u64,
    /// CRC-32C of the image.
    pub image_checksum: u32,
}

impl Subject {
    /// Describes a guest with this memory that boots from these files, read one after the other.
    ///
    /// # Errors
    ///
    /// Fails when a file cannot be read.
    pub fn new(ram: &[PageRange], image: &[&Path]) -> io::Result<Self> {
        let (mut bytes, mut checksum) = (0, 0);
        let mut buffer = vec![0; 1 << 20];
        for path in image {
            let mut file = File::open(path)?;
            loop {
                let count = file.read(&mut buffer)?;
                if count == 0 {
                    break;
                }
                bytes += count as u64;
                checksum = crc32c::crc32c_append(checksum, &buffer[..count]);
            }
        }
        Ok(Self {
            guest_bytes: ram.iter().map(|range| range.bytes()).sum(),
            span_pages: ram.iter().map(|range| range.end()).max().unwrap_or(0),
            image_bytes: bytes,
            image_checksum: checksum,
        })
    }
}

/// Why a working set is unusable, or was not written.
#[derive(Debug, thiserror::Error)]
pub enum WorkingSetError {
    /// It cannot be read.
    #[error("cannot read {}", .0.display())]
    Read(PathBuf, #[source] io::Error),
    /// It cannot be written.
    #[error("cannot write the working set to {}; name a file in a directory that exists, has room and that you may write to", .0.display())]
    Write(PathBuf, #[source] io::Error),
    /// Its length does not match its header.
    #[error("{bytes} bytes, {wanted} expected: cut short, or no working set")]
    Length {
        /// Actual length.
        bytes: u64,
        /// Expected length; a lower bound if the header is incomplete.
        wanted: u64,
    },
    /// It is not a working set.
    #[error("not a working set")]
    Magic,
    /// It has another version.
    #[error("a working set of version {0}, {VERSION} is known; record it again")]
    Version(u32),
    /// It has more runs than the limit.
    #[error("{0} runs of pages, {RUNS_MAX} is the limit")]
    Runs(u32),
    /// It is damaged.
    #[error("its checksum is {found:#010x}, its bytes give {computed:#010x}: it is damaged")]
    Checksum {
        /// The checksum in the file.
        found: u32,
        /// The computed checksum.
        computed: u32,
    },
    /// It was recorded for another guest.
    #[error("recorded for another {0}; record it again")]
    OtherSubject(&'static str),
    /// It has pages that the guest does not have.
    #[error("it names {count} pages from {first} on, the guest has {span}")]
    Pages {
        /// The first page.
        first: PageIndex,
        /// Number of pages.
        count: u32,
        /// Pages of the guest.
        span: u64,
    },
}

/// Encodes a file. Runs beyond [`RUNS_MAX`] are omitted.
#[must_use]
pub fn encode(subject: &Subject, runs: &[PageRange]) -> Vec<u8> {
    let runs = &runs[..runs.len().min(RUNS_MAX)];
    let header = Header {
        magic: MAGIC,
        version: U32::new(VERSION),
        page_bytes: U32::new(4096),
        guest_bytes: U64::new(subject.guest_bytes),
        span_pages: U64::new(subject.span_pages),
        image_bytes: U64::new(subject.image_bytes),
        image_checksum: U32::new(subject.image_checksum),
        runs: U32::new(u32::try_from(runs.len()).expect("at most the limit")),
    };
    let mut bytes = Vec::with_capacity(HEADER_BYTES + runs.len() * RUN_BYTES + CHECKSUM_BYTES);
    bytes.extend(header.as_bytes());
    for run in runs {
        bytes.extend(run.first.number().to_le_bytes());
        bytes.extend(run.count.to_le_bytes());
    }
    bytes.extend(crc32c::crc32c(&bytes).to_le_bytes());
    bytes
}

/// Decodes the runs of pages in a file that was recorded for `subject`, in the order of their first
/// touch.
///
/// # Errors
///
/// Fails when it is damaged, or was recorded for another guest.
pub fn decode(bytes: &[u8], subject: &Subject) -> Result<Vec<PageRange>, WorkingSetError> {
    let length = |wanted: usize| WorkingSetError::Length {
        bytes: bytes.len() as u64,
        wanted: wanted as u64,
    };
    let (header, rest) = bytes
        .split_first_chunk::<HEADER_BYTES>()
        .ok_or_else(|| length(HEADER_BYTES + CHECKSUM_BYTES))?;
    let header: Header = zerocopy::transmute!(*header);
    if header.magic != MAGIC {
        return Err(WorkingSetError::Magic);
    }
    if header.version.get() != VERSION {
        return Err(WorkingSetError::Version(header.version.get()));
    }
    let count = header.runs.get() as usize;
    if count > RUNS_MAX {
        return Err(WorkingSetError::Runs(header.runs.get()));
    }
    let wanted = HEADER_BYTES + count * RUN_BYTES + CHECKSUM_BYTES;
    if bytes.len() != wanted {
        return Err(length(wanted));
    }
    let (body, checksum) = rest
        .split_last_chunk::<CHECKSUM_BYTES>()
        .ok_or_else(|| length(wanted))?;
    let found = u32::from_le_bytes(*checksum);
    let computed = crc32c::crc32c(&bytes[..bytes.len() - CHECKSUM_BYTES]);
    if found != computed {
        return Err(WorkingSetError::Checksum { found, computed });
    }
    let other = WorkingSetError::OtherSubject;
    if header.page_bytes.get() as usize != PAGE_SIZE {
        return Err(other("page size"));
    }
    if (header.guest_bytes.get(), header.span_pages.get())
        != (subject.guest_bytes, subject.span_pages)
    {
        return Err(other("size of guest memory"));
    }
    if (header.image_bytes.get(), header.image_checksum.get())
        != (subject.image_bytes, subject.image_checksum)
    {
        return Err(other("kernel or initial RAM disk"));
    }
    let number = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().expect("four bytes"));
    let runs = body.chunks_exact(RUN_BYTES).map(|entry| {
        let (first, count) = entry.split_at(RUN_BYTES / 2);
        let run = PageRange::new(PageIndex::new(number(first)), number(count));
        if run.count == 0 || run.end() > subject.span_pages {
            return Err(WorkingSetError::Pages {
                first: run.first,
                count: run.count,
                span: subject.span_pages,
            });
        }
        Ok(run)
    });
    runs.collect()
}

/// Reads a file; see [`decode`].
///
/// # Errors
///
/// As there, and when it cannot be read. Reads no more than the limit of a working set.
pub fn load(path: &Path, subject: &Subject) -> Result<Vec<PageRange>, WorkingSetError> {
    let unreadable = |error| WorkingSetError::Read(path.into(), error);
    let file = File::open(path).map_err(unreadable)?;
    let most = HEADER_BYTES + RUNS_MAX * RUN_BYTES + CHECKSUM_BYTES;
    let mut bytes = Vec::new();
    // One more byte, so that a longer file is detected.
    file.take(most as u64 + 1)
        .read_to_end(&mut bytes)
        .map_err(unreadable)?;
    decode(&bytes, subject)
}

/// Writes a file atomically: readers find the earlier one or this one.
///
/// # Errors
///
/// Fails when it cannot be written; an earlier file still exists then.
pub fn save(path: &Path, bytes: &[u8]) -> Result<(), WorkingSetError> {
    let now = path_now(path);
    let temporary = temporary(&now);
    let written = create(&temporary).and_then(|mut file| {
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&temporary, &now)
    });
    written.map_err(|error| {
        // The first error is the one to report.
        let _ = fs::remove_file(&temporary);
        WorkingSetError::Write(path.into(), error)
    })
}

/// Checks whether a file can be written, without leaving one behind.
///
/// # Errors
///
/// Fails when it cannot be written.
pub fn check_writable(path: &Path) -> Result<(), WorkingSetError> {
    let checked = match fs::metadata(path) {
        Ok(found) if !found.is_file() => Err(io::ErrorKind::IsADirectory.into()),
        _ => create(&temporary(path)).and_then(|_| fs::remove_file(temporary(path))),
    };
    checked.map_err(|error| WorkingSetError::Write(path.into(), error))
}

/// Creates a file, replacing the remains of a killed process with the same id.
fn create(path: &Path) -> io::Result<File> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => OpenOptions::new().write(true).create_new(true).open(path),
    }
}

fn temporary(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{}.tmp", std::process::id()));
    name.into()
}

/// Records first touches, without a lock, a system call or an allocation: it reserves address space
/// for the limit.
#[derive(Debug)]
pub struct Recorder {
    /// An `AtomicU64` for each run: the first page in the upper half, the count in the lower; 0
    /// until it is stored.
    runs: Mapping,
    /// Number of runs so far; may exceed [`RUNS_MAX`] when some were omitted.
    count: AtomicUsize,
    /// A bit for each recorded page.
    seen: Mapping,
    span_pages: u64,
}

impl Recorder {
    /// Creates a recorder for the memory of a guest's start.
    ///
    /// # Errors
    ///
    /// Fails when the host has no address space left.
    pub fn new(homes: &HomeTable) -> io::Result<Self> {
        // Memory that is added later does not exist when the working set is replayed.
        let span_pages = homes.ram_span_pages();
        let words = usize::try_from(span_pages.div_ceil(64)).expect("64-bit host");
        Ok(Self {
            runs: Mapping::anonymous(RUNS_MAX * RUN_BYTES)?,
            count: AtomicUsize::new(0),
            seen: Mapping::anonymous(words.max(1) * size_of::<u64>())?,
            span_pages,
        })
    }

    /// Records a run unless its first page was touched before.
    pub fn record(&self, run: PageRange) {
        let word = |page: PageIndex| &self.seen.words()[page.index() / 64];
        let bit = |page: PageIndex| 1_u64 << (page.number() % 64);
        let first = run.first;
        if run.end() > self.span_pages {
            return;
        }
        // Relaxed: pages are independent of each other, and readers of the runs read nothing else.
        if word(first).load(Ordering::Relaxed) & bit(first) != 0 {
            return;
        }
        for page in run.iter() {
            word(page).fetch_or(bit(page), Ordering::Relaxed);
        }
        let index = self.count.fetch_add(1, Ordering::Relaxed);
        if index < RUNS_MAX {
            let entry = u64::from(first.number()) << 32 | u64::from(run.count);
            self.runs.words()[index].store(entry, Ordering::Relaxed);
        }
    }

    /// Returns the recorded runs; adjacent ones are merged.
    #[must_use]
    pub fn runs(&self) -> Vec<PageRange> {
        let count = self.count.load(Ordering::Relaxed).min(RUNS_MAX);
        let mut runs: Vec<PageRange> = Vec::new();
        for index in 0..count {
            let entry = self.runs.words()[index].load(Ordering::Relaxed);
            let half = |bits: u64| u32::try_from(bits & u64::from(u32::MAX)).unwrap_or(0);
            let run = PageRange::new(PageIndex::new(half(entry >> 32)), half(entry));
            match runs.last_mut() {
                _ if run.count == 0 => {}
                Some(last) if last.end() == u64::from(run.first.number()) => {
                    last.count += run.count;
                }
                _ => runs.push(run),
            }
        }
        runs
    }

    /// Returns whether some runs were omitted.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.count.load(Ordering::Relaxed) > RUNS_MAX
    }
}

#[cfg(test)]
mod tests;
