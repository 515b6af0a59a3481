//! Loads the initial RAM disk.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use crate::acpi::numa::NumaNode;
use crate::error::MachineError;
use crate::layout::PAGE_BYTES;
use crate::memory::MemorySize;

/// Bytes of an initrd that are read at once.
const PIECE_BYTES: usize = 1 << 20;

/// An initrd in guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LoadedInitrd {
    pub start: u64,
    pub bytes: u64,
}

/// An initial RAM disk.
#[derive(Clone, Debug)]
pub enum Initrd {
    /// A file.
    File(PathBuf),
    /// Bytes in memory.
    Built(Arc<[u8]>),
}

impl Initrd {
    /// Returns its name in messages.
    fn path(&self) -> &Path {
        match self {
            Self::File(path) => path,
            Self::Built(_) => Path::new("of --exec"),
        }
    }
}

/// Loads the initrd at the highest fitting address below the device hole, away from the kernel,
/// which ends at `kernel_end`.
pub(crate) fn load_initrd(
    initrd: &Initrd,
    memory: &GuestMemoryMmap,
    size: MemorySize,
    kernel_end: u64,
    nodes: &[NumaNode],
) -> Result<LoadedInitrd, MachineError> {
    match initrd {
        Initrd::File(path) => load_initrd_file(path, memory, size, kernel_end, nodes),
        Initrd::Built(archive) => {
            let bytes = u64::try_from(archive.len()).unwrap_or(u64::MAX);
            let start = room_for_initrd(initrd.path(), bytes, size, kernel_end, nodes)?;
            memory
                .write_slice(archive, GuestAddress(start))
                .map_err(initrd_not_written)?;
            Ok(LoadedInitrd { start, bytes })
        }
    }
}

fn initrd_not_written(source: vm_memory::GuestMemoryError) -> MachineError {
    MachineError::WriteMemory {
        what: "initrd",
        source,
    }
}

fn load_initrd_file(
    path: &Path,
    memory: &GuestMemoryMmap,
    size: MemorySize,
    kernel_end: u64,
    nodes: &[NumaNode],
) -> Result<LoadedInitrd, MachineError> {
    let read_error = |source| MachineError::InitrdRead {
        path: path.to_owned(),
        source,
    };
    let mut file = File::open(path).map_err(read_error)?;
    let metadata = file.metadata().map_err(read_error)?;
    if !metadata.is_file() {
        return Err(read_error(std::io::Error::other("not a regular file")));
    }
    let bytes = metadata.len();
    if bytes == 0 {
        return Err(MachineError::InitrdEmpty {
            path: path.to_owned(),
        });
    }
    let start = room_for_initrd(path, bytes, size, kernel_end, nodes)?;
    // Through a buffer, not directly into guest memory: a file system that pins the destination
    // pages, as 9p does, waits for them uninterruptibly. If their donor is lost, not even SIGKILL
    // ends the process.
    let mut piece = vec![0; PIECE_BYTES];
    let mut done = 0;
    while done < bytes {
        let left = usize::try_from(bytes - done).unwrap_or(PIECE_BYTES);
        piece.truncate(left);
        file.read_exact(&mut piece).map_err(read_error)?;
        memory
            .write_slice(&piece, GuestAddress(start + done))
            .map_err(initrd_not_written)?;
        done += piece.len() as u64;
    }
    Ok(LoadedInitrd { start, bytes })
}

/// Returns the memory for the initrd: that below the nodes in which the kernel is to keep nothing.
/// Linux keeps data of its own in a node that has the initrd.
fn preferred(size: MemorySize, kernel_end: u64, nodes: &[NumaNode]) -> MemorySize {
    let movable = nodes.iter().filter(|node| node.is_movable);
    let starts = movable.flat_map(|node| node.memory.iter().map(|(start, _)| *start));
    let first = starts.filter(|start| *start >= kernel_end).min();
    MemorySize {
        low_end: first.unwrap_or(size.low_end).min(size.low_end),
        ..size
    }
}

fn room_for_initrd(
    path: &Path,
    bytes: u64,
    size: MemorySize,
    kernel_end: u64,
    nodes: &[NumaNode],
) -> Result<u64, MachineError> {
    let start = initrd_start(bytes, preferred(size, kernel_end, nodes), kernel_end);
    let start = start.or_else(|| initrd_start(bytes, size, kernel_end));
    start.ok_or_else(|| MachineError::InitrdTooLarge {
        path: path.to_owned(),
        bytes,
        room: size
            .low_end
            .saturating_sub(kernel_end.next_multiple_of(PAGE_BYTES)),
    })
}

/// Returns the highest page from which `bytes` fit into low RAM above the kernel.
fn initrd_start(bytes: u64, size: MemorySize, kernel_end: u64) -> Option<u64> {
    let start = size.low_end.checked_sub(bytes)? / PAGE_BYTES * PAGE_BYTES;
    (start >= kernel_end).then_some(start)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::layout::DEVICE_HOLE_START;

    const GIB: u64 = 1 << 30;

    fn size(total: u64) -> MemorySize {
        MemorySize {
            total,
            low_end: total.min(DEVICE_HOLE_START),
        }
    }

    #[test]
    fn the_initrd_goes_to_the_end_of_low_memory() {
        assert_eq!(initrd_start(1, size(GIB), 0), Some(GIB - PAGE_BYTES));
        assert_eq!(
            initrd_start(PAGE_BYTES + 1, size(5 * GIB), 0),
            Some(3 * GIB - 2 * PAGE_BYTES)
        );
        assert_eq!(initrd_start(GIB, size(GIB), 0), Some(0));
        assert_eq!(initrd_start(GIB, size(GIB), 1), None);
        assert_eq!(initrd_start(GIB + 1, size(GIB), 0), None);
        assert_eq!(initrd_start(u64::MAX, size(GIB), 0), None);
    }

    #[test]
    fn it_goes_below_nodes_that_the_kernel_does_not_use() {
        let node = |start, is_movable| NumaNode {
            cpus: Vec::new(),
            memory: vec![(start, 64 << 20)],
            hotplug: None,
            is_movable,
            latency: std::time::Duration::from_micros(1),
            bandwidth_mb_s: None,
        };
        let end = |nodes: &[NumaNode]| preferred(size(GIB), 32 << 20, nodes).low_end;
        assert_eq!(end(&[]), GIB);
        assert_eq!(end(&[node(0, false), node(64 << 20, false)]), GIB);
        let nodes = [node(0, false), node(128 << 20, true), node(64 << 20, true)];
        assert_eq!(end(&nodes), 64 << 20);
        // The kernel itself is there already.
        assert_eq!(end(&[node(0, true)]), GIB);
        assert_eq!(end(&[node(5 * GIB, true)]), GIB);
    }

    #[test]
    fn an_initrd_larger_than_memory_is_refused_with_the_room_there_is() {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 4 << 20)]).unwrap();
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let load = |path: &Path| load_initrd_file(path, &memory, size(4 << 20), 3 << 20, &[]);
        assert!(matches!(
            load(file.path()),
            Err(MachineError::InitrdEmpty { .. })
        ));
        file.write_all(&[1; (1 << 20) + 1]).unwrap();
        let text = load(file.path()).unwrap_err().to_string();
        assert!(
            text.contains("1048577 bytes, larger than the 1048576"),
            "{text}"
        );
        file.as_file().set_len(1 << 20).unwrap();
        assert_eq!(load(file.path()).unwrap().start, 3 << 20);
        assert_eq!(memory.read_obj::<u8>(GuestAddress(3 << 20)).unwrap(), 1);
        let missing = load(Path::new("/does/not/exist"));
        assert!(matches!(missing, Err(MachineError::InitrdRead { .. })));
    }
}
