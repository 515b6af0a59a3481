//! Encoding of tables.

use acpi_tables::Aml;
use acpi_tables::sdt::Sdt;

pub(crate) const OEM_ID: [u8; 6] = *b"SSIHV ";
pub(crate) const OEM_TABLE_ID: [u8; 8] = *b"SSIHVTBL";
pub(crate) const OEM_REVISION: u32 = 1;

/// Bytes of the header that every table has.
const HEADER_BYTES: u32 = 36;

/// Encodes a table, or an object in it.
pub(crate) fn bytes_of(table: &dyn Aml) -> Vec<u8> {
    let mut bytes = Vec::new();
    table.to_aml_bytes(&mut bytes);
    bytes
}

/// Encodes a table with header and `body`.
pub(crate) fn table(signature: [u8; 4], revision: u8, body: &[u8]) -> Vec<u8> {
    let mut table = Sdt::new(
        signature,
        HEADER_BYTES,
        revision,
        OEM_ID,
        OEM_TABLE_ID,
        OEM_REVISION,
    );
    table.append_slice(body);
    table.as_slice().to_vec()
}
