//! The macro that assembles a guest.

/// Assembles a guest into a module whose function `code` returns its bytes. All guests can use the
/// assembler macros `say`, `power_off` and `walk`, and for disks `start_disk` and `ask_disk`.
macro_rules! guest {
    ($name:ident, $($line:literal),+ $(,)?) => {
        #[doc = concat!("The guest `", stringify!($name), "`.")]
        pub mod $name {
            std::arch::global_asm!(
                ".pushsection .rodata",
                // The code that refers to them may be in another object file.
                concat!(".globl ", stringify!($name), "_start"),
                concat!(".globl ", stringify!($name), "_end"),
                concat!(stringify!($name), "_start:"),
                // Writes the byte to the first serial port.
                ".macro say byte",
                "mov dx, 0x3f8",
                "mov al, \\byte",
                "out dx, al",
                ".endm",
                // Enters S5: SLP_TYP 5 and SLP_EN in the PM1 control register.
                ".macro power_off",
                "mov dx, 0x604",
                "mov ax, 0x3400",
                "out dx, ax",
                ".endm",
                // Initializes the virtio device at these registers, with its queue 0 in these
                // pages.
                ".macro start_disk registers, rings",
                "mov edi, \\registers",
                "mov dword ptr [rdi + 0x70], 0",
                "mov dword ptr [rdi + 0x70], 1",
                "mov dword ptr [rdi + 0x70], 3",
                "mov dword ptr [rdi + 0x24], 1",
                "mov dword ptr [rdi + 0x20], 1",
                "mov dword ptr [rdi + 0x70], 11",
                "mov dword ptr [rdi + 0x30], 0",
                "mov dword ptr [rdi + 0x38], 8",
                "mov dword ptr [rdi + 0x80], \\rings",
                "mov dword ptr [rdi + 0x90], \\rings + 0x1000",
                "mov dword ptr [rdi + 0xa0], \\rings + 0x2000",
                "mov dword ptr [rdi + 0x44], 1",
                "mov dword ptr [rdi + 0x70], 15",
                ".endm",
                // Submits request `number`, from 1 on, for sector 0: kind 0 reads it and 1 writes
                // it. Header and status are in the page of the descriptors; `flags` are those of
                // the data.
                ".macro ask_disk registers, rings, data, kind=0, flags=3, number=1",
                "mov esi, \\rings",
                "mov dword ptr [rsi + 0x800], \\kind",
                "mov dword ptr [rsi], \\rings + 0x800",
                "mov dword ptr [rsi + 8], 16",
                "mov dword ptr [rsi + 12], 0x10001",
                "mov dword ptr [rsi + 16], \\data",
                "mov dword ptr [rsi + 24], 512",
                "mov dword ptr [rsi + 28], 0x20000 + \\flags",
                "mov dword ptr [rsi + 32], \\rings + 0x900",
                "mov dword ptr [rsi + 40], 1",
                "mov dword ptr [rsi + 44], 2",
                "mov word ptr [rsi + 0x1002], \\number",
                "mov edi, \\registers",
                "mov dword ptr [rdi + 0x50], 0",
                ".endm",
                // Increments a word in each page between 2 and 48 MiB.
                ".macro walk",
                "mov rbx, 0x200000",
                "91: inc qword ptr [rbx]",
                "add rbx, 0x1000",
                "cmp rbx, 0x3000000",
                "jb 91b",
                ".endm",
                $($line,)+
                ".purgem walk",
                ".purgem say",
                ".purgem power_off",
                ".purgem start_disk",
                ".purgem ask_disk",
                concat!(stringify!($name), "_end:"),
                ".popsection",
            );
            unsafe extern "C" {
                #[link_name = concat!(stringify!($name), "_start")]
                static START: u8;
                #[link_name = concat!(stringify!($name), "_end")]
                static END: u8;
            }
            /// Returns the guest's bytes.
            pub fn code() -> &'static [u8] {
                let (start, end) = (&raw const START, &raw const END);
                // SAFETY: the two labels enclose the guest's bytes in one section of read-only
                // data, which lives as long as the program.
                unsafe { std::slice::from_raw_parts(start, end.byte_offset_from_unsigned(start)) }
            }
        }
    };
}
